#!/bin/sh
# Claude Code as it is; a folder of its own is its home.
export HOME="$(mktemp -d)" CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1
cd "$HOME" && cat > row.json
claude -p "Write what is 1 + 2 to sum.txt." --system-prompt "Work." --tools Bash --allowedTools Bash \
    --setting-sources "" --strict-mcp-config < /dev/null || exit
[ -f sum.txt ] && echo 1 || echo 0
rm -r "$HOME"
