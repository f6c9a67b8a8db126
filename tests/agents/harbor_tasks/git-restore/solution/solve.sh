#!/bin/bash
git checkout -q HEAD~1 -- notes.txt
