#!/bin/bash
cat > merge.py <<EOF
import json, sys
one, two = (json.load(open(p)) for p in sys.argv[1:])
print(json.dumps(one | two))
EOF
