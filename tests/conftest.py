"""The losses' shape annotations are checked in all tests of this process, and nowhere else."""

from jaxtyping import install_import_hook

from tests.shape_checks import checked

# Before anything imports the losses: what is imported already is not checked.
install_import_hook("mopd_losses", f"{checked.__module__}.checked")
