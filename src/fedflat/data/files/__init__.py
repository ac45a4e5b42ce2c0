"""Reading and writing dataset files: downloads, archives, memory maps, decoded images, and the cache of decoded arrays.

Modules here know file formats, not datasets; ``fedflat.data.sources`` builds datasets with them.
"""
