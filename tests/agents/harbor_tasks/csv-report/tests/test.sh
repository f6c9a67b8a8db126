#!/bin/bash
[ "$(cat total.txt)" = 60 ]
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
