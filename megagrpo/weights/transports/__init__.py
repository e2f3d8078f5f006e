"""Ways in which a bucket reaches an engine, one file each; `base.py` holds the contract."""
