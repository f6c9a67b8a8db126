#!/bin/bash
sed -i 's|return ordered\[len(ordered) // 2\]|n = len(ordered); return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2|' stats.py
