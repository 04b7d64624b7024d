// Frontend 1.36 in Nodes 2.0 mode shows "Image failed to load" for the mp4 of a node without a VIDEO input,
// unless the node says what kind of preview it has.
import { app } from "../../scripts/app.js";

app.registerExtension({
  name: "LowMem.VideoPreview",
  nodeCreated(node) {
    if (node.comfyClass === "LowmemWanStreamingDecode") node.previewMediaType = "video";
  },
});
