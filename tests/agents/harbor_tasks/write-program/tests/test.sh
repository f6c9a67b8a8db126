#!/bin/bash
python merge.py /tests/one.json /tests/two.json | python -c "import json, sys; assert json.load(sys.stdin) == {'a': 1, 'b': 3, 'c': 4}"
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
