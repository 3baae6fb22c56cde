"""Checkpoints: atomic, verified, resumable, and never a pickle."""

from thresher.checkpoint.directory import Staging, create_staging, discard, publish, recover, staging
from thresher.checkpoint.exact_json import load_json, save_json
from thresher.checkpoint.manifest import FileRecord, Manifest, read_manifest, record_files, verify
from thresher.checkpoint.optimizer import load_optimizer_state, optimizer_state
from thresher.checkpoint.retention import best, latest, list_checkpoints, prune, resolve_resume
from thresher.checkpoint.rng import capture_rng, join_rng, restore_rng, restore_rng_of_rank
from thresher.checkpoint.state import State, load_state, save_state
from thresher.checkpoint.stored import load_tensors
from thresher.checkpoint.tensors import save_tensors

__all__ = [
    "FileRecord",
    "Manifest",
    "Staging",
    "State",
    "best",
    "capture_rng",
    "create_staging",
    "discard",
    "join_rng",
    "latest",
    "list_checkpoints",
    "load_json",
    "load_optimizer_state",
    "load_state",
    "load_tensors",
    "optimizer_state",
    "prune",
    "publish",
    "read_manifest",
    "record_files",
    "recover",
    "resolve_resume",
    "restore_rng",
    "restore_rng_of_rank",
    "save_json",
    "save_state",
    "save_tensors",
    "staging",
    "verify",
]
