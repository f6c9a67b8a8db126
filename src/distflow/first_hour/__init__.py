"""The first hour on a GPU as a program: what only the device itself can show, step by step, and a report of it."""
