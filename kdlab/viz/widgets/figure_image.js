// The front end of kdlab.viz.widgets.figure_image.FigureImage: a PNG that is replaced in place, with its words.

function render({ model, el }) {
  const image = document.createElement("img");
  image.className = "kdlab-figure";
  let address = null;
  const show = () => {
    const png = model.get("png");
    if (address) URL.revokeObjectURL(address);
    address = URL.createObjectURL(new Blob([png], { type: "image/png" }));
    image.src = address;
    image.alt = model.get("words");
  };
  model.on("change:png", show);
  show();
  el.replaceChildren(image);
  return () => { model.off("change:png", show); URL.revokeObjectURL(address); };
}

export default { render };
