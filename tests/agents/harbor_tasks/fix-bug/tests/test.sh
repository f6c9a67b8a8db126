#!/bin/bash
cp /tests/hidden.py /app/test_hidden.py
python -m pytest -q -p no:cacheprovider test_hidden.py
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
