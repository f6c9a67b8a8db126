from distflow.util.parent import end_with_parent

end_with_parent()  # before all else takes its time

from distflow.cli import main  # noqa: E402

main()
