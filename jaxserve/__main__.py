"""`python -m jaxserve` is `jaxserve`."""

from jaxserve.cli import main

raise SystemExit(main())
