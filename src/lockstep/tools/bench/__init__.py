"""How fast a run is, beside the bare engine, and what more processes would bring."""
