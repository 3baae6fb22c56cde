"""Make the quickstart's model: a Llama with 0.6 million random weights, and a tokenizer trained on its data.

    python examples/quickstart/make_tiny_model.py output/quickstart/model

The same files every time, without a download, as `thresher demo` makes them. The model knows nothing yet: it shows how
a run works and that the preferences are learned, not how good its answers are. For a real model, set `pretrain` in the
config instead.
"""

from __future__ import annotations

import sys

from transformers.utils.logging import disable_progress_bar

from thresher.demo import make_model, make_tokenizer

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/quickstart/make_tiny_model.py DIRECTORY")
    disable_progress_bar()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    tokenizer.save_pretrained(sys.argv[1])
    model.save_pretrained(sys.argv[1])
    print(f"{sys.argv[1]}: {model.num_parameters():,} parameters, {len(tokenizer):,} tokens")
