"""Manifests for Kubernetes, for people to edit: no client library, and no key in them."""

from __future__ import annotations

import json
from collections.abc import Sequence

LEARNER_FLAGS = ("--bind", "0.0.0.0", "--keys", "/data/keys", "--checkpoint_path", "/data/run")
PLACES = {"ip", "address_file", "bind", "keys", "insecure", "checkpoint_path", "spool_path", "actor_id"}  # set here

# The files of a Secret belong to root and are open to others in the pod; serl-chunk takes neither. Names that are there
# already stay: a revoked key must not come back with the next pod.
_COPY = (
    "umask 077; mkdir -p {to}/{folder}; cd /secret; for f in *.json; do "
    "case $f in server.json) t={to}/$f;; *) t={to}/{folder}/$f;; esac; "
    "test -e $t || {{ cat $f > $t.part; mv $t.part $t; }}; done"
)

LEARNER = """\
# Of `serl-chunk fleet write`: edit it, then `kubectl apply -f` this folder.
apiVersion: v1
kind: Service
metadata:
  name: {name}-learner
spec:
  clusterIP: None  # its name is the pod's own address, also after the pod has moved
  publishNotReadyAddresses: true
  selector: {{app: {name}-learner}}
  ports:
    - {{name: learner, port: {port}}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {name}-learner
spec:
  serviceName: {name}-learner
  replicas: 1  # more would be refused: a run has one learner
  selector:
    matchLabels: {{app: {name}-learner}}
  template:
    metadata:
      labels: {{app: {name}-learner}}
    spec:
      terminationGracePeriodSeconds: 120  # for its last checkpoint
      initContainers:
        - name: keys
          image: {image}
          command: ["sh", "-c", {copy}]
          volumeMounts:
            - {{name: secret, mountPath: /secret, readOnly: true}}
            - {{name: data, mountPath: /data}}
      containers:
        - name: learner
          image: {image}
          command: ["serl-chunk"]
          args: {args}
          # resources: {{limits: {{nvidia.com/gpu: 1}}}}
          volumeMounts:
            - {{name: data, mountPath: /data}}  # the run folder, and the keys that it admits
            # Demonstrations of --demo_path need a volume too.
      volumes:
        - name: secret
          secret: {{secretName: {name}-learner-keys}}
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: ["ReadWriteOnce"]
        resources:
          requests: {{storage: 100Gi}}
"""

ACTORS = """\
# Of `serl-chunk fleet write`: edit it, then `kubectl apply -f` this folder.
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {name}-actors
spec:
  replicas: {actors}
  selector:
    matchLabels: {{app: {name}-actors}}
  template:
    metadata:
      labels: {{app: {name}-actors}}
    spec:
      terminationGracePeriodSeconds: 120  # to drain; what the learner lacks after that is lost with the pod
      initContainers:
        - name: keys
          image: {image}
          command: ["sh", "-c", {copy}]
          volumeMounts:
            - {{name: secret, mountPath: /secret, readOnly: true}}
            - {{name: keys, mountPath: /keys}}
      containers:
        - name: actor
          image: {image}
          command: ["serl-chunk"]
          args: {args}
          env:
            - name: POD_NAME  # the actor's id
              valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}
          lifecycle:
            preStop:
              exec: {{command: ["sh", "-c", "while kill -USR1 1; do sleep 2; done"]}}
          volumeMounts:
            - {{name: keys, mountPath: /keys, readOnly: true}}
            - {{name: spool, mountPath: /spool}}
      volumes:
        - name: secret
          secret: {{secretName: {name}-actor-keys}}
        - name: keys
          emptyDir: {{medium: Memory}}
        - name: spool  # kept while containers restart; lost with the pod
          emptyDir: {{}}
"""


def manifests(
    name: str, shared: Sequence[str], *, image: str, actors: int, acting: Sequence[str], port: int
) -> dict[str, str]:
    """Return the files of a fleet by name.

    Args:
        name: a DNS label.
        shared: flags of learner and actors; `acting`: more of an actor.
        port: of the learner.
    """
    own = [*shared, "--launched_with_learner"]
    places = ("--ip", f"{name}-learner", "--keys", "/keys", "--spool_path", "/spool")
    args = {"learner": [*own, *LEARNER_FLAGS, "--learner"], "actor": [*own, *places, *acting, "--actor"]}
    copies = {
        "learner": _COPY.format(to="/data/keys", folder="allowed"),
        "actor": _COPY.format(to="/keys", folder="learners"),
    }
    filled = {
        who: {"name": name, "image": json.dumps(image), "args": json.dumps(args[who]), "copy": json.dumps(copies[who])}
        for who in args
    }
    return {
        "learner.yaml": LEARNER.format(port=port, **filled["learner"]),
        "actors.yaml": ACTORS.format(actors=actors, **filled["actor"]),
    }


def secrets(name: str, keys: str) -> str:
    """Return the commands that make the Secrets, of the key folder `keys` on the machine that has them."""
    return (
        f"serl-chunk keys add --fleet {name} --host {name}-learner --keys {keys}   # after `serl-chunk keys init`\n"
        f"kubectl create secret generic {name}-learner-keys --from-file={keys}/server.json "
        f"--from-file={keys}/allowed/{name}.json\n"
        f"kubectl create secret generic {name}-actor-keys --from-file={keys}/fleets/{name}/learners\n"
        f"kubectl exec {name}-learner-0 -- serl-chunk keys revoke {name} --keys /data/keys   # when that is due; "
        f"a new key of that name is taken only after rm /data/keys/allowed/{name}.json there"
    )
