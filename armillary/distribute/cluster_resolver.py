"""The resolvers of `armillary.cluster`, under the name of TensorFlow's module.

`armillary.cluster` describes them. In a program that uses
`tf.distribute.cluster_resolver.TPUClusterResolver`, this line need not change.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.cluster import ClusterResolver as ClusterResolver
from armillary.cluster import KubernetesClusterResolver as KubernetesClusterResolver
from armillary.cluster import SimpleClusterResolver as SimpleClusterResolver
from armillary.cluster import SlurmClusterResolver as SlurmClusterResolver
from armillary.cluster import TFConfigClusterResolver as TFConfigClusterResolver
from armillary.cluster import TPUClusterResolver as TPUClusterResolver

_mark_public(globals())
