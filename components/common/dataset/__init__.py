"""A dataset of packed shards as a whole: their records, checks over all images, the data card, the manifest."""
