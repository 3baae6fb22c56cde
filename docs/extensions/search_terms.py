"""Words that readers search for and that a page does not have in its headings.

Each becomes an index entry of its page, which search puts first.
"""

from __future__ import annotations

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

TERMS = {
    "operate/checkpoints": ["checkpoint", "resume", "continue a run", "save"],
    "operate/troubleshooting": ["oom", "cuda out of memory", "nan", "nccl", "faq"],
    "reference/recipes": ["published settings", "example configs", "hyperparameters of a paper"],
    "scale/clusters": ["multi node", "multi-node", "multinode", "several nodes", "slurm", "kubernetes"],
    "scale/engines": ["deepspeed", "megatron"],
    "scale/memory": ["gpu memory", "vram"],
    "scale/parallelism": ["fsdp", "tensor parallel", "multi gpu", "multi-gpu", "several gpus"],
    "train/choose-a-loss": ["which loss", "simpo", "ipo", "orpo"],
    "train/data": ["dataset", "dataset format", "jsonl"],
    "train/hyperparameters": ["beta", "lr", "batch size", "epochs"],
    "train/publish": ["model card", "push to hub", "gguf", "llama.cpp", "vllm"],
    "train/lora": ["adapter", "peft"],
}


class SearchTerms(SphinxTransform):
    """Add the terms of a page to its top."""

    default_priority = 400

    def apply(self, **_arguments: object) -> None:
        if terms := TERMS.get(self.env.docname):
            entries = [("single", term, "", "main", None) for term in terms]
            section = next(iter(self.document.findall(nodes.section)), None)
            if section is not None:
                section.insert(1, addnodes.index(entries=entries))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(SearchTerms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
