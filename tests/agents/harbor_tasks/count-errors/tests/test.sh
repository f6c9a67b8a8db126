#!/bin/bash
[ "$(cat count.txt)" = 3 ]
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
