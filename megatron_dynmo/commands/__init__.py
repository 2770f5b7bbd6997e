"""The subcommands of `dynmo`, one file each: add_parser(subparsers) and run(args)."""
