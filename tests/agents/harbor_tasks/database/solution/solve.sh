#!/bin/bash
python -c "import sqlite3; print(sqlite3.connect('shop.db').execute('select customer from orders group by 1 order by sum(price) desc').fetchone()[0])" > best.txt
