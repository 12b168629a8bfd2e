"""The handlers with which Orbax writes a folder, and what we add at the end.

Imported inside functions only, because importing Orbax takes long.
"""

import orbax.checkpoint as ocp
from etils import epath

from armillary.checkpoint._checksums import write_checksums
from armillary.checkpoint._disk import sync_tree


class ItemsHandler(ocp.CompositeCheckpointHandler):
    """Writes items, lists their checksums, and has all of it on the disk."""

    def finalize(self, directory: epath.Path) -> None:
        """Ends a save, on the one process that gives the folder its name."""
        super().finalize(directory)
        # ORDER: after all processes have written, and before the folder is renamed.
        write_checksums(directory)
        sync_tree(directory)


# Orbax looks up what a handler takes by its type.
@ocp.args.register_with_handler(ItemsHandler, for_save=True, for_restore=True)
class ItemsArgs(ocp.args.Composite):
    """The items by name."""
