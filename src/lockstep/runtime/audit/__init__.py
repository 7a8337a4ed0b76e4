"""Somebody else's training script, run as torchrun would run it, with every optimizer step written down.

`start` runs the processes; `worker` is what each of them is; `witness` is what it writes down; `names` finds out what
the script calls its tensors. Nothing is sent between the processes: they leave files, and `lockstep.audit` compares.
"""
