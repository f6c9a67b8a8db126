from distflow.cli import main

main()
