"""Small synthetic checkpoints in the published form, and ways to damage a copy of one."""

import json
import shutil

from safetensors.torch import load_file, save_file

from kdlab.model.synthetic import write_drafter, write_target

SMALL = {"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3}
# Wide enough for four ranks to share the inner width of the experts.
WIDE = SMALL | {"hidden_size": 64, "moe_intermediate_size": 128, "intermediate_size": 64}
INDEX = "model.safetensors.index.json"


def write_pair(folder, changes=SMALL, **options):
    """Write folder/target and folder/drafter; return both."""
    write_target(folder / "target", changes=changes, **options)
    write_drafter(folder / "drafter", folder / "target")
    return folder / "target", folder / "drafter"


def shard_of(directory, name):
    return json.loads((directory / INDEX).read_text())["weight_map"][name]


def damaged(source, directory, shard, change):
    """Copy a target with `change` applied to the dict of one shard's tensors; the index follows."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    before = load_file(source / shard)
    after = change(dict(before))
    save_file(after, directory / shard)
    index = json.loads((directory / INDEX).read_text())
    for name in before.keys() - after.keys():
        del index["weight_map"][name]
    index["weight_map"] |= dict.fromkeys(after, shard)
    (directory / INDEX).write_text(json.dumps(index))
    return directory
