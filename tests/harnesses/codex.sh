#!/bin/sh
# Codex as it is; a folder of its own is its home.
export HOME="$(mktemp -d)"
cd "$HOME" && cat > row.json && mkdir .codex && cat > .codex/config.toml <<CONFIG
model = "$OPENAI_MODEL"
model_provider = "worker"
web_search = "disabled"
[model_providers.worker]
name = "worker"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
CONFIG
codex exec --skip-git-repo-check -s danger-full-access "Write what is 1 + 2 to sum.txt." < /dev/null || exit
[ -f sum.txt ] && echo 1 || echo 0
rm -r "$HOME"
