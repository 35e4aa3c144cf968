"""Measuring speed: every figure that kvpatch states comes from `kvpatch bench`."""
