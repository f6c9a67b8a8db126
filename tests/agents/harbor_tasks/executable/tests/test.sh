#!/bin/bash
[ "$(/opt/tools/shout hey you)" = "HEY YOU" ]
if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
