import sqlite3

db = sqlite3.connect("shop.db")
db.execute("create table orders(customer, price)")
db.executemany("insert into orders values (?, ?)", [("ann", 5), ("bob", 8), ("ann", 6)])
db.commit()
