"""Images as the steps read them: the DALI loader, image files, batches from memory, evaluation."""
