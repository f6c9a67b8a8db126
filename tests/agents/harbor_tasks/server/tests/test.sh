#!/bin/bash
python -c "import urllib.request; assert urllib.request.urlopen('http://localhost:8123/index.html', timeout=9).read() == b'here\\n'"
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
