"""One module per page; see ``workbench.app.registry`` for what each of them has."""
