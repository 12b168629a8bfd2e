"""The handlers with which Orbax writes a folder, and what we add at the end.

Imported inside functions only, because importing Orbax takes long.
"""

import threading
from collections.abc import Sequence

import orbax.checkpoint as ocp
from etils import epath

from armillary.checkpoint._checksums import write_checksums
from armillary.checkpoint._disk import sync_tree


class ItemsHandler(ocp.CompositeCheckpointHandler):
    """Writes items, lists their checksums, and has all of it on the disk.

    Attributes:
        earlier: Threads that end first: the save of another directory that began
            before this one, and that this one may speak of.
    """

    earlier: Sequence[threading.Thread] = ()

    def finalize(self, directory: epath.Path) -> None:
        """Ends a save, on the one process that gives the folder its name."""
        super().finalize(directory)
        # ORDER: after all processes have written, and before the folder is renamed.
        write_checksums(directory)
        sync_tree(directory)
        for thread in self.earlier:
            thread.join()


# Orbax looks up what a handler takes by its type.
@ocp.args.register_with_handler(ItemsHandler, for_save=True, for_restore=True)
class ItemsArgs(ocp.args.Composite):
    """The items by name."""
