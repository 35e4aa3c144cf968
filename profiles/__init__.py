"""Tuned profiles, benchmark records and recipes: data files, importable as ``kvpatch.profiles``."""
