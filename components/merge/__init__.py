"""Join the parts of a dataset that preprocess packed on several machines or at several times.

Reads:   all parts: the outputs of preprocess with part = 1/N to N/N.
Writes:  a Dataset, the same that preprocess writes without parts.
Needs:   nothing. Shards are linked where the file system can, and copied elsewhere.
"""
