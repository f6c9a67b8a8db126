#!/bin/bash
right=0
for i in 1 2 3 4; do [ "$(cat $i.txt 2> /dev/null)" = $i ] && right=$((right + 1)); done
python -c "import json; print(json.dumps({'reward': $right / 4, 'files': $right}))" > /logs/verifier/reward.json
