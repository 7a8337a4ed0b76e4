"""Audit of a user's own training script: run it as torchrun would and record every optimizer step.

`launcher` starts the processes, `worker` is the main function of each, `recorder` records the steps, `tensor_names`
finds the script's names of its tensors, and `analysis` compares the files that the processes wrote.
"""
