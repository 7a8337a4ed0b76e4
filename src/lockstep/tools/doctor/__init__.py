"""Is this machine fit to train on? One file for each thing that is looked at; each yields lines, good and bad."""
