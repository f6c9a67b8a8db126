#!/bin/bash
grep -rwh ERROR logs | wc -l > count.txt
