#!/bin/bash
[ "$(sha256sum notes.txt | cut -c1-64)" = "$(echo remember the milk | sha256sum | cut -c1-64)" ]
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
