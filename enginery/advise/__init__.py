"""How many GPUs of which kind a model needs: predicted from its graph, data sheets and our measurements."""
