"""Imported last by the server of test processes: garbage collection skips the objects of all modules.

Otherwise the first full collection in every forked process visits a million objects of torch and copies their pages,
which takes 0.3 s.
"""

import gc

gc.collect()
gc.freeze()
