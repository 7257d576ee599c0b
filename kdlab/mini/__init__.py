"""kimi-k26-mini: the text it is trained on, its training from scratch, its export and its evaluation."""
