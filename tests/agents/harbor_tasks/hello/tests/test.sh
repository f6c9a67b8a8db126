#!/bin/bash
[ "$(cat greeting.txt)" = hello ]
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
