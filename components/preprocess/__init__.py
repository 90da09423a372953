"""Turn a folder of labelled images into WebDataset shards with a DALI index, splits and statistics.

Reads:   a folder with one sub-folder per class, or train/ and val/ folders of them.
Writes:  a Dataset: train-*.tar, val-*.tar and their .idx files, train.jsonl and val.jsonl (what is in them),
         rejected.jsonl (what is not, and why), manifest.json.
Needs:   no GPU. Every image is decoded once, on all cores.
"""
