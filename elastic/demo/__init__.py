"""A byte-level language model on real text, and `elasticd demo`, which trains it and kills a worker on the way."""
