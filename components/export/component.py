"""export as KFP components: of a Checkpoint of the train step, of a model of the user's own, of a Bundle."""

from kfp import dsl

from components.common.contracts.container_images import image_for


@dsl.component(base_image=image_for("export"), packages_to_install=[], install_kfp_package=False)
def export(
    checkpoint: dsl.Input[dsl.Model],
    dataset: dsl.Input[dsl.Dataset],
    calibration_method: str,
    num_calibration_images: int,
    max_drop_points: float,
    settings: dict,  # type: ignore[type-arg]
    gate_settings: dict,  # type: ignore[type-arg]
    bundle: dsl.Output[dsl.Model],
) -> None:
    """Checkpoint -> ONNX in three precisions and TensorRT engines."""
    from components.export.__main__ import STEP

    values = {
        "calibration_method": calibration_method,
        "num_calibration_images": num_calibration_images,
        # What INT8 may cost is what the gate will accept.
        "gate": {**gate_settings, "max_drop_points": max_drop_points},
    }
    STEP.execute({**settings, **values}, model=checkpoint.path, dataset=dataset.path, output=bundle.path)


@dsl.component(base_image=image_for("export"), packages_to_install=[], install_kfp_package=False)
def export_own(
    model: str,
    dataset: dsl.Input[dsl.Dataset],
    architecture: str,
    image_size: int,
    calibration_method: str,
    num_calibration_images: int,
    max_drop_points: float,
    settings: dict,  # type: ignore[type-arg]
    gate_settings: dict,  # type: ignore[type-arg]
    bundle: dsl.Output[dsl.Model],
) -> None:
    """Own checkpoint or ONNX file -> ONNX in three precisions and TensorRT engines."""
    from components.export.__main__ import STEP

    values = {
        "architecture": architecture,
        "image_size": image_size,
        "calibration_method": calibration_method,
        "num_calibration_images": num_calibration_images,
        # What INT8 may cost is what the gate will accept.
        "gate": {**gate_settings, "max_drop_points": max_drop_points},
    }
    STEP.execute({**settings, **values}, model=model, dataset=dataset.path, output=bundle.path)


@dsl.component(base_image=image_for("export"), packages_to_install=[], install_kfp_package=False)
def export_engines(
    model: str,
    dataset: dsl.Input[dsl.Dataset],
    settings: dict,  # type: ignore[type-arg]
    bundle: dsl.Output[dsl.Model],
) -> None:
    """Bundle of another machine -> the same with TensorRT engines for the GPU here."""
    from components.export.__main__ import STEP

    STEP.execute(settings, model=model, dataset=dataset.path, output=bundle.path)
