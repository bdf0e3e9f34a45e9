"""The nouns of PicoSpore: what the scripts beside this folder share."""
