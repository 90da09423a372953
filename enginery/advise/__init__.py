"""The number and kind of GPUs that a model needs: predicted from its graph, data sheets and our measurements."""
