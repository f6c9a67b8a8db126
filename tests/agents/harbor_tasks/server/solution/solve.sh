#!/bin/bash
cd site
python -m http.server 8123 > /dev/null 2>&1 &
for i in $(seq 50); do python -c "import socket; socket.create_connection(('localhost', 8123))" 2> /dev/null && exit; sleep 0.1; done
