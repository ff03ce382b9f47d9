"""The one place where MuJoCo Warp's contacts are bent to MuJoCo's: the tangents of plane-capsule contacts."""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# Kernels are written in Warp's language, whose types are not Python's.

from __future__ import annotations

import mujoco
import mujoco_warp as mjw
import warp as wp

wp.set_module_options({"enable_backward": False})

_PLANE = wp.constant(int(mujoco.mjtGeom.mjGEOM_PLANE))
_CAPSULE = wp.constant(int(mujoco.mjtGeom.mjGEOM_CAPSULE))


def align_contacts(model: mjw.Model, data: mjw.Data) -> None:
    """Correct the frames of the contacts just found; a ``contactfilter`` callback of the simulation."""
    contact = data.contact
    inputs = [model.geom_type, data.geom_xmat, contact.geom, contact.worldid, data.nacon]
    wp.launch(align_plane_capsule_frames, dim=data.naconmax, inputs=inputs, outputs=[contact.frame])


@wp.kernel
def align_plane_capsule_frames(
    geom_type: wp.array[int],
    geom_xmat: wp.array2d[wp.mat33],
    contact_geom: wp.array[wp.vec2i],
    contact_world: wp.array[int],
    contact_count: wp.array[int],
    frames: wp.array[wp.mat33],
):
    """Turn the tangents of plane-capsule contacts along the capsule, however steep, as MuJoCo's C code does.

    MuJoCo Warp does so only within 60 degrees of the plane; the friction pyramid turns with the frame.
    """
    contact = wp.tid()
    if contact >= contact_count[0]:
        return
    geoms = contact_geom[contact]
    if geom_type[geoms[0]] != _PLANE or geom_type[geoms[1]] != _CAPSULE:
        return
    rotation = geom_xmat[contact_world[contact], geoms[1]]
    axis = wp.vec3(rotation[0, 2], rotation[1, 2], rotation[2, 2])
    frame = frames[contact]
    normal = wp.vec3(frame[0, 0], frame[0, 1], frame[0, 2])
    along = axis - normal * wp.dot(normal, axis)
    if wp.length(along) > 1.0e-6:
        along = wp.normalize(along)
        across = wp.cross(normal, along)
        frames[contact] = wp.mat33(
            normal[0], normal[1], normal[2], along[0], along[1], along[2], across[0], across[1], across[2]
        )  # fmt: skip
