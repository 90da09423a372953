"""Turn labelled images into WebDataset shards with a DALI index, splits, statistics and a data card.

Reads:   class folders, train/ and val/ of them, ImageNet's layout, an archive of these, WebDataset tars, or a table;
         by a path or a URI. Or parallel text, for translation. See docs/data.md.
Writes:  a Dataset: train-*.tar, val-*.tar and their .idx files, train.jsonl and val.jsonl (what is in them),
         rejected.jsonl (what is not, and why), data_card.html, manifest.json. With part, a part of it for merge.
         Of text: train.tsv, val.tsv, vocabulary.model, rejected.jsonl, data_card.html, manifest.json.
Needs:   no GPU. Every image is decoded once, on all cores.
"""
