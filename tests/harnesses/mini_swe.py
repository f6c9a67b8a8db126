"""mini-swe-agent as it is: commands in bash, each turn one of them."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = yaml.safe_load(Path(package_dir / "config" / "mini.yaml").read_text())
with tempfile.TemporaryDirectory() as folder:
    model = LitellmModel(model_name=f"openai/{os.environ['OPENAI_MODEL']}", **config["model"])
    config["agent"].pop("mode", None)
    agent = DefaultAgent(model, LocalEnvironment(cwd=folder), **config["agent"] | {"step_limit": 3})
    agent.run(json.load(sys.stdin)["prompt"])
    print(json.dumps({"reward": float((Path(folder) / "sum.txt").is_file())}))
